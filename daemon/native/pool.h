// Worker threads that run reductions, fairly among shares and in order of priority within each, and report completions
// through an eventfd.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "request.h"

namespace allreduced {

// All methods may be called from any thread, but close() only from one at a time. In a child after fork the threads
// do not exist: only destruction is allowed there, and it leaves the copied state alone.
class Pool {
   public:
    // Starts `threads` threads, thread i pinned to cpus[i % cpus.size()] unless `cpus` is empty, with their nice value
    // set to `nice` unless that is 0. Throws std::invalid_argument (threads, cpus, nice out of range, a CPU that this
    // process may not use) or std::system_error (no thread, no descriptor, no permission for a negative nice value).
    Pool(int threads, const std::vector<int>& cpus, int nice);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const;

    // Returns the eventfd, readable exactly while completions wait; -1 once closed. The pool owns it.
    int descriptor() const;

    // Queues a job. While several shares have jobs, each of them gets the same part of the threads, by the bytes that
    // its jobs read and write; within a share higher priority first, then in order of submission. Throws
    // std::invalid_argument once closed.
    void submit(std::int64_t job, Request request, std::int64_t priority, std::int64_t share = 0);

    // Returns the jobs that completed since the last call, in order of completion. Never waits for a job.
    std::vector<std::int64_t> completed();

    // Finishes the jobs that have begun, drops those that have not, joins the threads, closes the eventfd. What
    // completed can still be asked for. Idempotent.
    void close();

   private:
    struct State;
    std::unique_ptr<State> state_;
    int owner_;  // process id
};

}  // namespace allreduced
