"""What each `radixkv` command does; `radixkv.scheduler.cli.main` imports one only when it runs."""
