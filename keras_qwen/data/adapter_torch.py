"""Batches as a torch `DataLoader`."""

from torch.utils.data import DataLoader, IterableDataset


class _Batches(IterableDataset):
    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def as_loader(batches):
    return DataLoader(_Batches(batches), batch_size=None)
