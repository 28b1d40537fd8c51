"""The embedded MQTT broker: who may do what, packets, sockets, and how it is found."""
