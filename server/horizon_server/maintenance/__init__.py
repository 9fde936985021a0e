"""What an administrator does to a whole state folder: back it up, restore it, check it."""
