"""Runs the demo: make demo, or python -m examples.demo."""

from examples.demo.run import main

if __name__ == "__main__":
    main()
