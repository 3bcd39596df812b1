"""The values that flow through a step."""
