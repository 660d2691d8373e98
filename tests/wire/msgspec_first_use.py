"""Crash of msgspec itself, without code of this project: threads that decode the same struct for the first time.

`python tests/wire/msgspec_first_use.py [PROCESSES]` counts the processes that a signal ends; pytest does not run it. It
needs no more than msgspec. With msgspec 0.22 and Python 3.11, 20 of 20 processes ended with a segmentation fault.
"""

import subprocess
import sys

CRASH = """
import sys, threading, msgspec
sys.setswitchinterval(1e-6)
names = [f"f{i}" for i in range(20)]
items = [msgspec.defstruct(f"Item{i}", [(name, int) for name in names]) for i in range(60)]
pages = [msgspec.defstruct("Page", [("items", list[item])]) for item in items]
body, together = msgspec.json.encode({"items": [dict.fromkeys(names, 1)] * 20}), threading.Barrier(8)
def work():
    for page in pages:
        together.wait()
        msgspec.json.decode(body, type=page)
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""

if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    ends = [subprocess.run([sys.executable, "-c", CRASH], check=False, timeout=120).returncode for _ in range(total)]
    sys.stdout.write(f"{sum(code < 0 for code in ends)} of {total} processes were ended by a signal\n")
