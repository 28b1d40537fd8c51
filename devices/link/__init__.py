"""The data link: messages straight between devices."""
