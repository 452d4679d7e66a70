"""How a video, the memory it needs and what was changed about it read in a sentence. Pure."""

from svdq.pipeline.parameters import VideoParameters


def chunk_of(parameters: VideoParameters) -> int:
    """Give the number of frames that are decoded at a time."""
    return min(parameters.decode_chunk_size or parameters.num_frames, parameters.num_frames)


def place(ranks: tuple[int, ...], num_ranks: int) -> str:
    """Say whose memory it is that these of K ranks compute in."""
    if len(ranks) > 1:
        return f"on the GPU that ranks {', '.join(map(str, ranks))} share"
    (rank,) = ranks
    if num_ranks == 1:
        return "on this worker's only rank"
    if rank == num_ranks - 1:
        return "on the last rank of this group"
    return "on the first rank of this group" if rank == 0 else f"on rank {rank} of this group"


def differences(before: VideoParameters, after: VideoParameters) -> str:
    """Say what was changed to make a video fit."""
    changes = []
    if after.frames != before.frames:
        changes.append(f"{after.frames} frames in place of {before.frames}")
    if chunk_of(after) < min(chunk_of(before), after.num_frames):
        changes.append(f"decode_chunk_size {after.decode_chunk_size} in place of {before.decode_chunk_size}")
    return f"adjusted to memory: {', '.join(changes)}"


def shape_text(parameters: VideoParameters) -> str:
    """Name what of a video decides its memory."""
    chunk = chunk_of(parameters)
    in_chunks = f", decoded {chunk} at a time," if chunk < parameters.num_frames else ""
    return f"{parameters.width}x{parameters.height} with {frames_text(parameters.num_frames)}{in_chunks}"


def frames_text(number: int) -> str:
    """Write a number of frames."""
    return "1 frame" if number == 1 else f"{number} frames"
