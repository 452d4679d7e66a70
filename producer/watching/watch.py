"""Watching a folder, put together: what `svdq watch` calls. Knows no terminal and no signals."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.order import Order
from svdq.producer.watching.aftermath import REJECTED, Then, sweep_copies
from svdq.producer.watching.changes import Changes, Notifications, Polling, Stop
from svdq.producer.watching.defaults import FolderDefaults
from svdq.producer.watching.events import Event, Summary, Troubles
from svdq.producer.watching.ledger import Ledger, State
from svdq.producer.watching.selection import Selection
from svdq.producer.watching.settling import Settling, Signature
from svdq.producer.watching.sight import Sight
from svdq.producer.watching.submitter import Submitter
from svdq.producer.watching.taker import Taker
from svdq.producer.watching.tree import Tree
from svdq.producer.watching.watcher import Watcher


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How a folder is watched."""

    #: Which files are taken.
    selection: Selection = field(default_factory=Selection)
    #: Whether those are, too, that lay there before the folder was first watched.
    existing: bool = False
    #: Seconds without a change after which a file has stopped growing.
    settle_s: float = 2.0
    #: What is done with files afterwards: `keep`, `move:DIR` or `delete`.
    then: str = "keep"
    #: Look at the folder again and again, instead of having the kernel tell of changes.
    poll: bool = False
    #: Take what is there and end.
    once: bool = False


def watch(
    settings: Settings, folder: Path, order: Order, options: WatchOptions, tell: Callable[[Event], None], stop: Stop
) -> Summary:
    """Watch a folder until told to stop, or once.

    Args:
        settings: of this process.
        folder: what to watch.
        order: what is wanted of photos where no svdq.toml says otherwise.
        options: how.
        tell: is told of each event.
        stop: ends it, after the file at hand.

    Raises:
        InputError: the folder or an option is not allowed, or the folder is watched already; nothing was done.
        UnavailableError: the ledger cannot be used; with `once` also Redis or the storage.
    """
    storage = Storage(settings.storage).folder
    root = _root(folder, storage)
    then = Then.read(options.then, root)
    defaults = FolderDefaults(root, order)
    with Submitter(settings) as submitter, Ledger(settings.home, root) as ledger:
        away = _away(submitter)
        if away is not None and options.once:
            raise away
        _make_room(then, root)
        excluded = [root / REJECTED, *filter(None, (then.target, storage))]
        if settings.home != root and settings.home.is_relative_to(root):
            excluded.append(settings.home)
        tree = Tree(root, options.selection, excluded)
        changes = _changes(root, options, stop)
        changes.wait()  # from here on nothing that is dropped goes unnoticed

        settling = Settling(options.settle_s)
        troubles = Troubles(tell)
        existing = options.existing or options.once
        taker = Taker(
            tree=tree,
            ledger=ledger,
            defaults=defaults,
            submitter=submitter,
            then=then,
            settling=settling,
            settle_s=options.settle_s,
            patient=not options.once,
            tell=tell,
        )
        watcher = Watcher(
            sight=Sight(tree, ledger, changes, settling, troubles, existing=existing),
            settling=settling,
            taker=taker,
            changes=changes,
            troubles=troubles,
            stop=stop,
        )
        left = [] if existing else list(_old_files(tree, ledger))
        ledger.begin(options.selection, left)
        num_photos = sum(tree.takes(path) for path, _ in left)
        note = f" {num_photos:,} photos that are there already are left alone; --existing takes them."
        tell(Event(kind="watching", text=f"Watching {str(root)!r}.{note if num_photos else ''}"))
        if away is not None:
            watcher.wait_out(away)
        if options.once:
            watcher.run_once()
        else:
            watcher.run()
        taker.summary.waiting += len(settling)
        tell(Event(kind="stopped", text=f"{taker.summary.sentence()}."))
        return taker.summary


def _root(folder: Path, storage: Path | None) -> Path:
    if not folder.is_dir():
        raise InputError(f"There is no folder {str(folder)!r} to watch; make it, or check its path.")
    root = folder.resolve()
    if storage is not None and root.is_relative_to(storage.resolve()):
        raise InputError(f"The folder {str(root)!r} is in svdq's own storage, where nothing is dropped; watch another.")
    try:
        os.scandir(root).close()
    except OSError as error:
        raise InputError(f"The folder {str(root)!r} cannot be read ({error.strerror}); check its rights.") from error
    return root


def _away(submitter: Submitter) -> UnavailableError | None:
    """Find out whether Redis answers, so that who starts a watcher is told at once."""
    try:
        submitter.reach()
    except UnavailableError as error:
        return error
    return None


def _changes(root: Path, options: WatchOptions, stop: Stop) -> Changes:
    if options.poll or options.once:
        return Polling()
    return Notifications(root, options.selection.recursive, stop)


def _make_room(then: Then, root: Path) -> None:
    """See to it that files can be put away before the first one is taken."""
    try:
        if not then.keeps and not os.access(root, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root))
        if then.target is not None:
            then.target.mkdir(parents=True, exist_ok=True)
            sweep_copies(then.target)
    except OSError as error:
        raise InputError(
            f"Photos cannot be moved or deleted in {error.filename!r} ({error.strerror}); "
            "check its rights, or leave them where they are with --then keep."
        ) from error


def _old_files(tree: Tree, ledger: Ledger) -> Iterator[tuple[str, Signature]]:
    """Find files that lay there before the folder was first watched, or before it was watched in this way.

    Raises:
        OSError: the folder cannot be read.
    """
    scope = ledger.scope
    for folder, files in tree.scan():
        known = ledger.in_folder(folder)
        for name, signature in files.items():
            path = f"{folder}/{name}" if folder else name
            is_photo = tree.takes(path)
            # One that was told of as no photo is a photo by the patterns of today.
            is_known = name in known and not (is_photo and known[name].state is State.OTHER)
            was_watched = scope is not None and (scope.takes(path) if is_photo else scope.sees(path))
            if not is_known and not was_watched:
                yield path, signature
