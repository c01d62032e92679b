"""Our own model: the hierarchy with a prior that is learned."""
