-- Rules of TACC Vista: options that its job_submit plugin refuses.
function slurm_job_submit(job, partition, uid)
    if job.partition == "strict" and (job.tres_per_node or job.tres_per_task) then
        slurm.log_user("--gres and --gpus-per-task are not allowed here")
        return 2051
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partition, uid)
    return slurm.SUCCESS
end
