"""`python -m edge_run` is `edge-run`."""

from edge_run.cli import main

if __name__ == "__main__":
    main()
