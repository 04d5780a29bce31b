"""Scripts of this folder in processes of their own, because devices have to be simulated before TensorFlow starts."""

import json
import os
import subprocess
import sys
from pathlib import Path


def start(script, *arguments, **environment):
    """A script by its name, started with arguments and more environment variables."""
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, arguments)]
    settings = {**os.environ, **environment}
    return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """`(return code, output, errors)` of a process when it is done."""
    try:
        output, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, output, errors


def result_of(process):
    """The JSON in the last line that a process has printed."""
    code, output, errors = finish(process)
    assert code == 0, errors[-3000:]
    return json.loads(output.strip().splitlines()[-1])
