"""What commands share about the terminal: Rich consoles, tables, and ctrl-C."""
