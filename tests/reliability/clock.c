/* The clock of a process goes back by an hour as soon as the file that CLOCK_IS_BACK names exists.

   Preloaded, it stands before the C library's functions, which Python and torch call. Time since a start is left alone,
   as it is where somebody sets the clock. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    const char *file = getenv("CLOCK_IS_BACK");
    int status = (int)syscall(SYS_clock_gettime, clock, now);
    if ((clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && file != NULL && access(file, F_OK) == 0)
        now->tv_sec -= 3600;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int status = clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return status;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now != NULL)
        *now = found.tv_sec;
    return found.tv_sec;
}
