"""Records of ranks, without the ranks."""

import redis

from svdq.pipeline.planning.costs import ShapeCosts
from svdq.producer import keys
from svdq.producer.status.ranks import RankStatus

COSTS = ShapeCosts(frames=2, width=64, height=64, guided=True, step_s=(0.5, 0.25), encode_s=0.1, decode_s=2.0)


def rank(number: int, group: str = "here-1", **values: object) -> RankStatus:
    return RankStatus(
        **{
            "group": group,
            "rank": number,
            "num_ranks": 2,
            "host": "here",
            "pid": 7,
            "device": "cpu",
            "model": "preview",
            "started_at": 1.0,
            "at": 2.0,
            **values,
        }
    )


def save(connection: redis.Redis, *ranks: RankStatus) -> None:
    """Record ranks for an hour: on a busy machine a test takes longer than their records last."""
    with connection.pipeline() as pipeline:
        for status in ranks:
            status.save(pipeline)
            pipeline.expire(status.key, 3600)
        pipeline.expire(keys.RANKS, 3600)
        pipeline.execute()
