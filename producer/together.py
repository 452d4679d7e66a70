"""Reads of Redis that share their round trips: it may be far away."""

from collections.abc import Callable, Generator
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
    results: dict[int, Any] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(reads)))
    while len(results) < len(reads):
        with connection.pipeline(transaction=False) as pipeline:
            ends = {}
            for number in answers:
                begin = len(pipeline)
                try:
                    reads[number].send(answers[number])(pipeline)
                    ends[number] = slice(begin, len(pipeline))
                except StopIteration as end:
                    results[number] = end.value
            found = pipeline.execute(raise_on_error=False)
        answers = {number: found[part] for number, part in ends.items()}
    return [results[number] for number in range(len(reads))]


def ask_one(connection: redis.Redis, read: Read[T]) -> T:
    """Return the result of one read."""
    result: T = ask(connection, read)[0]
    return result


def checked(answers: list[Any]) -> list[Any]:
    """Return answers of which none is an error; raises the first error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
