"""Which documents stand in which row of which batch, for every epoch: a function of their lengths and a seed.

Everything is planned by windows, sets of documents that are the same in every epoch, so that the number of rows is,
too, and a plan is small. An epoch has the windows, and the rows in each, in an order of its own.
"""

import numpy as np

from keras_qwen.data.packing import fit_rows

_PLANS_KEPT = 4


class Plan:
    """The batches of every epoch.

    Args:
        lengths: int array, the positions that each example takes.
        sequence_length: positions in a row.
        batch_size: rows in a batch of one host.
        packing: `"best_fit"`, `"first_fit"` or None.
        bucket_lengths: ascending lengths that rows have without packing; the last is the sequence_length.
        shuffle: whether epochs differ.
        seed: of their order.
        window: examples planned together.
        shard_index, shard_count: which of the hosts this one is.
        drop_remainder: whether to leave out rows that do not fill a batch; else it is filled up with empty rows.

    Attributes:
        batches_per_epoch: on every host alike.
    """

    def __init__(
        self,
        lengths,
        *,
        sequence_length,
        batch_size,
        packing,
        bucket_lengths,
        shuffle,
        seed,
        window,
        shard_index,
        shard_count,
        drop_remainder,
    ):
        self._lengths, self._sequence_length, self._packing = lengths, sequence_length, packing
        self._buckets = np.array(bucket_lengths)
        self._shuffle, self._seed, self._shard = shuffle, seed, shard_index
        self._drop_remainder = drop_remainder
        self._batch_size, self._global_batch_size = batch_size, batch_size * shard_count
        count = len(lengths)
        order = np.random.default_rng([seed, 0]).permutation(count) if shuffle else np.arange(count)
        self._windows = [order[i : i + window] for i in range(0, count, window)]
        self._plans = {}
        self._rows_in = np.array([len(self._window_rows(0, w)) for w in range(len(self._windows))])
        rows = int(self._rows_in.sum())
        whole, rest = divmod(rows, self._global_batch_size)
        self.batches_per_epoch = whole + (bool(rest) and not drop_remainder)

    def batch(self, epoch, number):
        """The rows of a batch.

        Args:
            epoch: from 0 on.
            number: of the batch in the epoch.

        Returns:
            List of `batch_size` rows, each a list of examples' numbers, and the length of the rows.
        """
        start = number * self._global_batch_size
        rows = self._rows(epoch, start, start + self._global_batch_size)
        own = rows[self._shard * self._batch_size : (self._shard + 1) * self._batch_size]
        return own, self._row_length(rows)

    def fill_rate(self, tokens):
        """The share of positions of the first epoch, on all hosts, that hold a token.

        Args:
            tokens: int array, of each example.
        """
        filled = positions = 0
        for number in range(self.batches_per_epoch):
            start = number * self._global_batch_size
            rows = self._rows(0, start, start + self._global_batch_size)
            filled += int(tokens[[example for row in rows for example in row]].sum())
            positions += len(rows) * self._row_length(rows)
        return filled / positions

    def _row_length(self, rows):
        if self._packing:
            return self._sequence_length
        longest = max((self._lengths[row[0]] for row in rows if row), default=0)
        return int(self._buckets[np.searchsorted(self._buckets, longest)])

    def _rows(self, epoch, start, end):
        """Rows [start, end) of an epoch, filled up with empty ones where it is over."""
        windows = self._order(epoch, len(self._windows))
        ends = np.cumsum(self._rows_in[windows])
        rows = []
        for place in range(int(np.searchsorted(ends, start, side="right")), len(windows)):
            first = int(ends[place] - self._rows_in[windows[place]])
            rows += self._window_rows(epoch, int(windows[place]))[max(start - first, 0) : end - first]
            if end <= ends[place]:
                break
        return rows + [[]] * (end - start - len(rows))

    def _window_rows(self, epoch, window):
        key = (epoch if self._shuffle else 0, window)
        if key not in self._plans:
            while len(self._plans) >= _PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)), None)  # grain's threads plan side by side
            self._plans[key] = self._packed_rows(*key) if self._packing else self._padded_rows(*key)
        return self._plans[key]

    def _packed_rows(self, epoch, window):
        members = self._windows[window]
        if self._packing == "best_fit":  # first fit keeps to the order, on which its number of rows depends
            members = members[self._order(epoch, len(members), window, 1)]
        rows = fit_rows(self._lengths[members].tolist(), self._sequence_length, self._packing)
        return [members[rows[i]].tolist() for i in self._order(epoch, len(rows), window, 2)]

    def _padded_rows(self, epoch, window):
        """Full batches of one bucket, and one last batch of what is left of each, filled up with empty rows."""
        size = self._global_batch_size
        members = self._windows[window]
        members = members[self._order(epoch, len(members), window, 1)]
        buckets = np.searchsorted(self._buckets, self._lengths[members])
        batches, left = [], []
        for bucket in range(len(self._buckets)):
            left += members[buckets == bucket].tolist()
            while len(left) >= size:  # what is left of shorter buckets goes first
                batches.append(left[:size])
                left = left[size:]
        if left and not self._drop_remainder:
            batches.append(left)
        batches = [batches[i] for i in self._order(epoch, len(batches), window, 2)]
        return [row for batch in batches for row in [[example] for example in batch] + [[]] * (size - len(batch))]

    def _order(self, epoch, count, *purpose):
        """An order of `count` things. Purposes end in another number than 0, to which numpy adds zeros."""
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng([self._seed, 1 + epoch, *purpose]).permutation(count)
