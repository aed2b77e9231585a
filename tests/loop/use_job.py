"""Run several commands in one process, which imports vLLM once: `python use_job.py '[["generate", ...], ...]'`.

A command whose run needs other patches starts the program again (restart_in_environment), which goes on with that
command.
"""

import json
import os
import sys

from verl_patches.__main__ import app

for number, words in enumerate(json.loads(sys.argv[1])):
    if number < int(os.environ.get("NEXT_COMMAND", 0)):
        continue
    os.environ["NEXT_COMMAND"] = str(number)
    sys.stdout.flush()
    app(words, standalone_mode=False)
