"""A temporary folder that goes away with the object that holds it, or at exit."""

import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryFolder:
    """An empty folder.

    Attributes:
        path: of the folder.
    """

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="keras_qwen_"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
