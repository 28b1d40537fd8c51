"""Files of many requests, answered without a server: resumable, in passes that the answers share."""
