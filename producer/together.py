"""Reads of Redis that share their round trips: it may be far away."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

import redis
from redis.client import Pipeline

T = TypeVar("T")

#: A read yields a function that puts commands into a pipeline, gets their answers, and may go on to ask for more.
Read = Generator[Callable[[Pipeline], object], list[Any], T]


def ask(connection: redis.Redis, *reads: Read[Any]) -> list[Any]:
    """Return the results of several reads, which take as many round trips as the longest of them.

    Raises the first error that a read does not handle itself: answers may be errors.
    """
    return ask_one(connection, together(*reads))


def together(*reads: Read[Any]) -> Read[list[Any]]:
    """Make one read of several; its result has theirs."""
    results: dict[int, Any] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(reads)))
    while len(results) < len(reads):
        puts: dict[int, Callable[[Pipeline], object]] = {}
        parts: dict[int, slice] = {}  # of the answers
        for number in answers:
            try:
                puts[number] = reads[number].send(answers[number])
            except StopIteration as end:
                results[number] = end.value
        found = (yield partial(_put, puts, parts)) if puts else []
        answers = {number: found[part] for number, part in parts.items()}
    return [results[number] for number in range(len(reads))]


def _put(puts: dict[int, Callable[[Pipeline], object]], parts: dict[int, slice], pipeline: Pipeline) -> None:
    first = len(pipeline)
    for number, put in puts.items():
        begin = len(pipeline)
        put(pipeline)
        parts[number] = slice(begin - first, len(pipeline) - first)


def ask_one(connection: redis.Redis, read: Read[T]) -> T:
    """Return the result of one read."""
    answers: Any = None
    while True:
        with connection.pipeline(transaction=False) as pipeline:
            try:
                read.send(answers)(pipeline)
            except StopIteration as end:
                result: T = end.value
                return result
            answers = pipeline.execute(raise_on_error=False)


def checked(answers: list[Any]) -> list[Any]:
    """Return answers of which none is an error; raises the first error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
