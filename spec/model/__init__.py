"""The models: who owns each block, and small guarded steps from state to state."""
