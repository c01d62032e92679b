"""What happens to a client's answer before it counts: checks, filters against hostile clients, privacy."""
