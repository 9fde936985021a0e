"""`python -m horizon_client`: the `horizon` command without its script."""

from horizon_client.cli import main

if __name__ == "__main__":
    main()
