"""The rules, one module per subject: each rule is a named sentence."""
