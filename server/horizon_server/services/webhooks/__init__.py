"""Webhooks: what they are told, how it is sent, and who may have them."""
