/* Preloaded into the processes of a host: its wall clock is ahead by the int32 in the file $WALL_CLOCK, which may change
   at any time, as when somebody sets the clock. Clocks that only go forward stay as they are. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int32_t none;
static const volatile int32_t *ahead = &none;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        ahead = mapped;
    if (file >= 0)
        close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *also)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (also)
        *also = now.tv_sec;
    return now.tv_sec;
}

/* The next moment to look whether the clock was set meanwhile, by the kernel's clock; 1: it is the end of the wait. */
static int next_look(const struct timespec *until, struct timespec *look)
{
    struct timespec end = *until;
    end.tv_sec -= *ahead;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, look);
    look->tv_nsec += 100000000;
    if (look->tv_nsec >= 1000000000) {
        look->tv_nsec -= 1000000000;
        look->tv_sec++;
    }
    if (end.tv_sec > look->tv_sec || (end.tv_sec == look->tv_sec && end.tv_nsec > look->tv_nsec))
        return 0;
    *look = end;
    return 1;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until)
{
    struct timespec look;
    int last, result;
    if (until->tv_sec < 1000000000) /* of a condition with the monotonic clock */
        return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    do {
        last = next_look(until, &look);
        result = pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &look);
    } while (result == ETIMEDOUT && !last);
    return result;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until)
{
    struct timespec look;
    int last, result;
    do {
        last = next_look(until, &look);
        result = sem_clockwait(semaphore, CLOCK_REALTIME, &look);
    } while (result && errno == ETIMEDOUT && !last);
    return result;
}
