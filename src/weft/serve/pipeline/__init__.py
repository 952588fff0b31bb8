"""The document `pipeline`: what stages did and waited for, beside what was foreseen, and their memory."""
