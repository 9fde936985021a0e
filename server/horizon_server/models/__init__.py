"""Pushed model folders: validated, safetensors only, never code."""
