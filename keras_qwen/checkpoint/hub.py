"""Checkpoints on the Hugging Face Hub: fetching the files that are needed, and publishing new ones.

huggingface_hub does the transport, so the cache, tokens, resuming, HF_HOME and HF_HUB_OFFLINE are as everywhere else.
It is imported late: that takes a while, and folders do not need it.
"""

import contextlib
import dataclasses
import fnmatch
import glob
import os
import tempfile
from pathlib import Path

from keras_qwen.checkpoint.file_names import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    COMPANION_FILES,
    CONFIG_NAME,
    INDEX_NAME,
    TOKENIZER_FILES,
    WEIGHTS_NAME,
)
from keras_qwen.checkpoint.safetensors_files import read_index

# Fetched first and in silence; the weights come second, because the index names them.
_SMALL_FILES = {
    "config": (CONFIG_NAME,),
    "tokenizer": TOKENIZER_FILES,
    "model": (CONFIG_NAME, INDEX_NAME, *COMPANION_FILES),
    "adapter": (ADAPTER_CONFIG_NAME,),
}
# Published together: whoever publishes one of a set replaces the whole set.
_SETS = ((WEIGHTS_NAME, INDEX_NAME, "model-*-of-*.safetensors"), TOKENIZER_FILES)
_OTHER_WEIGHTS = (".bin", ".gguf", ".h5", ".msgpack", ".pt", ".pth", ".safetensors")


def resolve(source, what, *, revision=None, token=None, cache_dir=None, local_files_only=False) -> Path:
    """The folder that holds a checkpoint's files; fetched from the Hub if `source` is no folder.

    All files are of one commit. Call it once for all that belongs together: two calls may meet two commits.

    Args:
        source: a folder, or a Hub id `"name"` or `"organisation/name"`. A folder is returned as it is; what is in it
            is for its reader to check.
        what: `"config"`, `"tokenizer"`, `"model"` (config, tokenizer and the safetensors weights) or `"adapter"`: which
            files are needed. No others are fetched.
        revision: branch, tag or commit on the Hub; default: its main branch.
        token: access token; True for the stored one, which is also the default; False for none.
        cache_dir: folder to keep fetched files in; default: Hugging Face's cache.
        local_files_only: whether to look in the cache only.

    Returns:
        The folder's path.

    Raises:
        OSError: if a path does not exist; if the repository, the revision or a needed file does not, may not be read,
            cannot be reached or is not in the cache. The message says which, and the remedy.
        ValueError: if `source` can be neither, or the weights' index names something else than files beside it.

    Example:
        >>> resolve("Qwen/Qwen2.5-0.5B-Instruct", "model", revision="main")  # doctest: +SKIP
    """
    if what not in _SMALL_FILES:
        raise ValueError(f"what={what!r} is unknown; known are {', '.join(_SMALL_FILES)}.")
    folder = _local_folder(source)
    if folder is not None:
        return folder
    _check_id(source)
    repository = _Repository(source, token, cache_dir, local_files_only)
    folder = repository.fetch(_SMALL_FILES[what], revision, silent=True)
    commit = folder.name
    needed = _needed_files(folder, what)
    if weights := [name for name in _missing(folder, needed) if name not in _SMALL_FILES[what]]:
        repository.fetch(weights, commit)
    if missing := _missing(folder, needed):
        raise OSError(repository.explain_missing(missing, commit))
    return folder


def push(save, repo_id, *, token=None, private=None, commit_message="Upload with keras_qwen", revision=None) -> str:
    """Publishes a checkpoint on the Hub, in one commit: nobody ever fetches half of it.

    Weights of an earlier checkpoint in the repository give way to the new ones, and so do tokenizer files; everything
    else there stays.

    Args:
        save: function of a folder (a `pathlib.Path`, empty) that writes the files into it. The folder is temporary, and
            lies where TMPDIR says: there must be room for the checkpoint.
        repo_id: Hub id; the repository is created if it does not exist. Without an organisation: the token's owner's.
        token: access token that may write; True for the stored one, which is also the default.
        private: whether a new repository is private; default: as its owner has set.
        commit_message: the commit's first line.
        revision: branch to commit to, created if it does not exist; default: the main branch.

    Returns:
        Address of the commit.

    Raises:
        OSError: if the Hub cannot be reached or does not accept it.
        ValueError: if `repo_id` is none.

    Example:
        >>> push(model.save_pretrained, "me/my-qwen", private=True)  # doctest: +SKIP
    """
    from keras_qwen.ops.processes import by_first  # late: it imports Keras, which fetching can do without

    _check_id(repo_id)
    with tempfile.TemporaryDirectory(prefix="keras_qwen-") as temporary:
        folder = Path(temporary) / "checkpoint"  # a level down: a saver that swaps folders has room beside it
        folder.mkdir()
        save(folder)
        return by_first(lambda: _upload(folder, repo_id, token, private, commit_message, revision))


def _upload(folder, repo_id, token, private, commit_message, revision):
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    with _explained(repo_id, revision, f"pass token= of one that may write to {repo_id}, or run `hf auth login`"):
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # now with the owner's name
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        stale = _replaced(api.list_repo_files(repo_id, revision=revision), files)
        # Not upload_folder: it may split a folder into several commits.
        commit = api.create_commit(
            repo_id,
            [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
            + [CommitOperationDelete(name) for name in stale],
            commit_message=commit_message,
            revision=revision,
        )
    return str(commit.commit_url)


@dataclasses.dataclass(frozen=True)
class _Repository:
    """A repository on the Hub, and how to get at it."""

    id: str
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool

    def fetch(self, names, revision, *, silent=False) -> Path:
        """Fetches those of the named files that exist; returns the commit's folder in the cache."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm

        class Silent(tqdm):
            def __init__(self, *args, **options):
                super().__init__(*args, **{**options, "disable": True})

        with self._explained(self.id, revision):
            folder = snapshot_download(
                self.id,
                revision=revision,
                token=self.token,
                cache_dir=self.cache_dir,
                local_files_only=self.local_files_only,
                allow_patterns=[glob.escape(name) for name in names],
                tqdm_class=Silent if silent else None,
            )
        return Path(folder)

    def explain_missing(self, names, commit) -> str:
        """Why needed files are not there after fetching, and what to do."""
        from huggingface_hub import HfApi, constants

        listed = ", ".join(names)
        if self.local_files_only or constants.HF_HUB_OFFLINE:
            return f"{listed} of {self.id} (commit {commit}) is not in the cache: {self._way_online()}."
        with self._explained(f"{listed} of {self.id}", commit):
            files = HfApi(token=self.token).list_repo_files(self.id, revision=commit)
        if set(names) <= set(files):  # the Hub was not within reach a moment ago
            return f"{listed} of {self.id} (commit {commit}) could not be fetched: call again."
        text = f"{self.id} (commit {commit}) has no {listed}."
        if CONFIG_NAME in names and ADAPTER_CONFIG_NAME in files:
            return f"{text} It holds an adapter, not a model."
        if ADAPTER_CONFIG_NAME in names and CONFIG_NAME in files:
            return f"{text} It holds a model, not an adapter."
        others = [name for name in files if name.endswith(_OTHER_WEIGHTS)]
        if others and names[-1] in (WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME):
            text += (
                f" It has {', '.join(others[:4])}, which keras_qwen does not read: convert to safetensors "
                f"(save_pretrained of transformers or peft does), and load the folder with the result."
            )
        return text

    def _explained(self, subject, revision):
        access = "pass token= of an account that may read it, or run `hf auth login`"
        return _explained(subject, revision, access, self._way_online())

    def _way_online(self):
        from huggingface_hub import constants

        if self.local_files_only:
            return "pass local_files_only=False to fetch it"
        if constants.HF_HUB_OFFLINE:
            return "unset HF_HUB_OFFLINE to fetch it"
        return "check the connection and call again, complete files are kept"


@contextlib.contextmanager
def _explained(subject, revision, access, online="check the connection, and that HF_HUB_OFFLINE is not set"):
    """Turns errors of huggingface_hub, httpx and hf_xet into an OSError that says what to do.

    Args:
        subject: what is wanted.
        revision: of the repository.
        access: what to do if the token does not suffice.
        online: what to do if the Hub cannot be reached.
    """
    from huggingface_hub import errors

    kinds = (errors.HTTPError, errors.LocalEntryNotFoundError, errors.LocalTokenNotFoundError)
    try:
        yield
    except (*kinds, ConnectionError, TimeoutError, RuntimeError) as error:  # hf_xet raises RuntimeError
        # "Not in the cache" is what remains of a refusal if nothing is in the cache either.
        problem = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
        status = problem.response.status_code if isinstance(problem, errors.HfHubHTTPError) else None
        if isinstance(problem, errors.GatedRepoError):
            text = f"{subject} is gated: ask for access on its page on the Hub; then {access}."
        elif isinstance(problem, errors.RepositoryNotFoundError):
            text = f"{subject} is neither a folder nor a repository to be seen on the Hub. If it is private, {access}."
        elif isinstance(problem, errors.RevisionNotFoundError):
            text = f"{subject} has no revision {revision!r} on the Hub: pass a branch, a tag or a commit of it."
        elif isinstance(problem, errors.LocalTokenNotFoundError) or status in (401, 403):
            text = f"The Hub gives no access to {subject}: {access}. ({problem})"
        elif isinstance(problem, errors.LocalEntryNotFoundError):
            text = f"{subject} is not in the cache, or not all of it: {online}. ({problem})"
        else:
            text = f"Exchanging {subject} with the Hub failed: {online}. ({problem!r})"
        raise OSError(text) from error


def _local_folder(source) -> Path | None:
    """The folder that `source` names; None if it does not look like a path."""
    path = Path(os.path.expanduser(source))
    if source != "" and path.is_dir():
        return path
    if path.is_file():
        raise OSError(f"{source} is a file; pass the folder it lies in.")
    text = os.fspath(source)
    if (
        isinstance(source, os.PathLike)
        or path.is_absolute()
        or text.startswith((".", "~"))
        or text.endswith("/")
        or text.count("/") > 1
        or "\\" in text
    ):
        raise OSError(f"There is no folder {text}. (A Hub id would have the form 'name' or 'organisation/name'.)")
    return None


def _check_id(repo_id):
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"{repo_id!r} is neither a folder nor a Hub id 'name' or 'organisation/name'.") from error


def _needed_files(folder, what):
    """Names of the files that must be there, as far as the small ones tell."""
    if what == "config":
        return (CONFIG_NAME,)
    if what == "tokenizer":
        pair = ("vocab.json", "merges.txt")
        return ("tokenizer.json",) if _missing(folder, pair) else pair
    if what == "adapter":
        return (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME)
    index = folder / INDEX_NAME
    if not index.is_file():
        return (CONFIG_NAME, WEIGHTS_NAME)
    names = sorted(set(read_index(index).values()))  # a single file beside them would be a duplicate
    strange = [name for name in names if not name.endswith(".safetensors")]
    if strange or not names:
        raise ValueError(f"{index} names {', '.join(strange) or 'no file'}; the weights must be .safetensors files.")
    return (CONFIG_NAME, *names)


def _missing(folder, names):
    return [name for name in names if not (folder / name).is_file()]


def _replaced(old, new):
    """Which of the `old` files the `new` ones make stale; transformers would prefer a left-over model.safetensors."""

    def members(patterns, names):
        return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}

    return sorted(name for patterns in _SETS if members(patterns, new) for name in members(patterns, old) - set(new))
