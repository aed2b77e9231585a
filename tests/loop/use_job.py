"""Run several commands in one process, which imports vLLM once: `python use_job.py '[["generate", ...], ...]'`.

A command that begins with "cut" ends in the middle of its third line, like a killed process. A command whose run needs
other patches starts the program again (restart_in_environment), which goes on with that command.
"""

import contextlib
import json
import os
import sys
from unittest import mock

from verl_patches.__main__ import app
from verl_patches.tools.inference.rows import Lines

add = Lines.add


class Cut(BaseException):
    """Stand in for a kill of the process."""


def half(self, line):
    if self.count == 2:
        self._file.write(json.dumps(line)[:20].encode())
        raise Cut
    add(self, line)


for number, words in enumerate(json.loads(sys.argv[1])):
    if number < int(os.environ.get("NEXT_COMMAND", 0)):
        continue
    os.environ["NEXT_COMMAND"] = str(number)
    sys.stdout.flush()
    if words[0] == "cut":
        with mock.patch.object(Lines, "add", half), contextlib.suppress(Cut):
            app(words[1:], standalone_mode=False)
            raise AssertionError(f"was not cut: {words}")
    else:
        app(words, standalone_mode=False)
