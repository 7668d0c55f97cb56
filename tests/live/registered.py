"""Names of all registered policies. In this process other tests' policies would be among them."""

from __future__ import annotations

import subprocess

from kvreplay.program import program

REGISTERED = subprocess.run(
    [*program(), "policies", "--names"], capture_output=True, text=True, check=True
).stdout.split()
