/* What the commands that run as services share (`serve`, `draft-worker`): their signals, and what they
 * tell the service manager. Main thread. */
#ifndef SO_CLI_SERVICE_H
#define SO_CLI_SERVICE_H

/* A signalfd for SIGTERM and SIGINT; SIGPIPE is ignored. Call it before any thread is started: threads
 * inherit the mask. -1: failed. */
int so_service_signals(void);
/* Sends "READY=1", "STOPPING=1", … to the service manager if NOTIFY_SOCKET is set. */
void so_service_notify(const char *state);

#endif
