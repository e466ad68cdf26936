"""Log lines of a long run, each with the seconds since its start."""
import time

START = time.monotonic()


def log_line(text):
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)
