"""The Device protocol and its implementations: queues, events and a bounded arena."""
