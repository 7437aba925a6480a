"""What commands share about the terminal: Rich consoles, tables, logs, and ctrl-C."""
