"""The Redis backend: one string per block, in Redis or Valkey."""
