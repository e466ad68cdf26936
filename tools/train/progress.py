"""Lines of a long run, each with the seconds since it began."""
import time

START = time.monotonic()


def say(text):
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)
