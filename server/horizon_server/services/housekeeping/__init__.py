"""What is deleted when: by users on purpose, and by the daemon because nothing needs it or its time is over."""
