"""Control messages: topics, envelopes, bodies, and what was refused."""
