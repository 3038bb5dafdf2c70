// The trusted programs inside a container, linked statically so that they run in any image.
//
//   warden init          process 1: reaps orphans, ends (and with it everything in the container) when its stdin ends
//   warden run ARGV...   runs a command with one pipe for stdout and stderr; says "ready", then its wait status on its own stderr,
//                        which the command doesn't hold and, because this process isn't dumpable, can't open
//   warden sweep         kills every process that this user may kill, but for process 1
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

static int init(void) {
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    struct pollfd fds[2] = {{.fd = 0, .events = POLLIN}, {.fd = signalfd(-1, &children, SFD_CLOEXEC), .events = POLLIN}};
    char waste[512];
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        if (poll(fds, 2, -1) < 0 && errno != EINTR) return 1;
        if (fds[1].revents) (void)!read(fds[1].fd, waste, sizeof waste);
        if (fds[0].revents && read(0, waste, sizeof waste) <= 0) return 0;
    }
}

static int run(char **argv) {
    prctl(PR_SET_DUMPABLE, 0);
    dprintf(2, "ready\n");
    pid_t child = fork();
    if (child < 0) {
        dprintf(1, "%s: %s\n", argv[0], strerror(errno));
        dprintf(2, "%d\n", 126 << 8);
        return 0;
    }
    if (child == 0) {
        setsid();
        dup2(1, 2);
        execvp(argv[0], argv);
        dprintf(1, "%s: %s\n", argv[0], strerror(errno));
        _exit(errno == EACCES ? 126 : 127);
    }
    close(0);
    close(1);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    dprintf(2, "%d\n", status);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "init") == 0) return init();
    if (argc > 2 && strcmp(argv[1], "run") == 0) return run(argv + 2);
    if (argc == 2 && strcmp(argv[1], "sweep") == 0) return kill(-1, SIGKILL) < 0 && errno != ESRCH;
    return 2;
}
