-- Adds an event of a video to the outbox of webhooks. ARGV: its type, the id of the video.
add_event(ARGV[1], ARGV[2])
