"""Model implementations of the verifier and the registry that picks one."""
