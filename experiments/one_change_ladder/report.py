def render(record):
    return ""
