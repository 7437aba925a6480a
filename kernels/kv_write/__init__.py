"""KV writes: the keys and values of new tokens into the block pools."""
