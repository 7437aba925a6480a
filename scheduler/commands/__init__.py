"""What each `radixkv` command does; `radixkv.scheduler.cli` imports one only when it runs."""
