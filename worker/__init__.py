"""What both roles are made of: session server, registration, mailbox, engine thread, link ends."""
