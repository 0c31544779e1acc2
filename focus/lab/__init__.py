"""Worlds with exact values, and the whole method in them: questions answered with many seeds."""
