"""Checks of clients' answers before they count, filters against hostile clients, privacy."""
