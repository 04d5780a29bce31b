"""What grain does for us: batches made ahead of their use, and records encoded in worker processes, all in order."""

import sys
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports jax wherever that is installed, with all that it has to say
    import grain
from absl import flags

_CHUNKS_AHEAD = 4


class Stream:
    """Batches one after the other, without end.

    Args:
        make: called with a batch's number, returns the batch.
        start: number of the first batch.
        prefetch: batches made ahead, in a thread; 0 for none.

    Attributes:
        number: of the batch that comes next.
    """

    def __init__(self, make, start, prefetch):
        self.number = start
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._iterator = iter(grain.MapDataset.range(start, sys.maxsize).map(make).to_iter_dataset(options))

    def __next__(self):
        batch = next(self._iterator)
        self.number += 1
        return batch

    def close(self):
        """End the thread."""
        self._iterator.close()


def map_in_processes(function, count, workers):
    """Call a picklable function for each of `count` numbers, in other processes, and yield what it returns, in order.

    The processes are spawned: a script that is run has to stand under `if __name__ == "__main__":`.
    """
    if not flags.FLAGS.is_parsed():  # grain reads its flags, and not every program has parsed some
        flags.FLAGS.mark_as_parsed()
    results = grain.MapDataset.range(count).map(function)
    results = results.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    options = grain.MultiprocessingOptions(num_workers=min(workers, count), per_worker_buffer_size=_CHUNKS_AHEAD)
    iterator = iter(results.mp_prefetch(options))
    try:
        yield from iterator
    finally:
        iterator.close()
