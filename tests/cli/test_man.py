#!/usr/bin/env python3
"""The committed manual page is what the command says of itself now. Speaks TAP."""
import os
import subprocess
import sys

sooth = os.environ.get("SOOTH_BIN", "build/sooth")
made = subprocess.run([sys.executable, "tools/man.py", sooth], check=True, stdout=subprocess.PIPE).stdout
same = made == open("man/sooth.1", "rb").read()
print("1..1")
print("ok 1 - man page is current" if same else "not ok 1 - run: tools/man.py build/sooth > man/sooth.1")
sys.exit(0 if same else 1)
