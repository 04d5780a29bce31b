"""Ctrl-C and `kill`: noticed at once, acted upon when the step is done."""

import signal
import threading


class Interruption:
    """Catches SIGINT and SIGTERM between `install` and `remove`; the second one interrupts as if uncaught.

    Attributes:
        received: the signal that came, or None.
    """

    def __init__(self):
        self.received, self._before = None, {}

    def install(self):
        """Starts to catch; does nothing in a thread other than the main one, where Python delivers no signals."""
        self.received = None
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)

    def remove(self):
        """Gives the signals back to those who handled them before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: of another language

    def stop(self, message):
        """Ends the program (or the notebook's cell) as the signal would have.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM, with status 143.
        """
        received = self.received
        self.remove()
        if received == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise SystemExit(128 + received)

    def _note(self, number, frame):
        print(f"\n{signal.Signals(number).name}: saving after this step. Once more to stop at once.", flush=True)
        self.received = number
        self.remove()  # the second one is not for us
