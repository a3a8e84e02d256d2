"""Collectives and messages between ranks."""
