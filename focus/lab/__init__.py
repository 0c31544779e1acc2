"""Worlds with exact values, the whole loop jitted over seeds, and what is measured in them."""
